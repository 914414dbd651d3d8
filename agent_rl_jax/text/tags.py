"""Marks of the `tags` protocol: the roles, the end of a turn and two tags.

Only the names, so that a tokenizer can be trained with them before any chat
format exists.  Invariant: no mark is a part of another one.
"""

PAD = '<|pad|>'
SYSTEM = '<|system|>'
USER = '<|user|>'
ASSISTANT = '<|assistant|>'
TOOL = '<|tool|>'
END = '<|end|>'
THINK, THINK_END = '<think>', '</think>'
CODE, CODE_END = '<code>', '</code>'

TAGS = (THINK, THINK_END, CODE, CODE_END)  # what the policy itself may write
TAG_CONTROL = (PAD, SYSTEM, USER, ASSISTANT, TOOL, END, *TAGS)
HEADERS = {
    'system': SYSTEM,
    'user': USER,
    'assistant': ASSISTANT,
    'tool': TOOL,
}
