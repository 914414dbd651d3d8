"""Entry points: thin absl mains without logic of their own."""
