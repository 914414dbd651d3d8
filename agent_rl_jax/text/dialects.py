"""How calls and results look in text, and which marks end a turn.

What the `template` protocol needs beside a template; TemplateOptions says what
each dialect means.  Left out: reading calls (text/parsers.py).  Invariant: all
of it is plain text, so every vocabulary can say it.
"""

CODE_INSTRUCTIONS = r"""You can run Python. To do so, write one block

```python
print(2 * 3)
```

and stop there: what it prints is sent to you. Once you know the answer, write it as \boxed{answer}."""

HERMES_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

# Marks that end a turn in the families whose templates were checked.
KNOWN_ENDS = (
    '<|im_end|>',
    '<|endoftext|>',
    '<|eot_id|>',
    '<|eom_id|>',
    '<|end_of_text|>',
    '<end_of_turn>',
    '<eos>',
    '</s>',
)

# What a policy may write as marks where its vocabulary has them.
SAID = (
    '<think>',
    '</think>',
    '<tool_call>',
    '</tool_call>',
)

# Beginning and end of a result in a user's turn, and what ends a call.
DIALECTS = {
    'code_block': ('```output\n', '\n```', ('\n```\n',)),
    'hermes': ('<tool_response>\n', '\n</tool_response>', ()),
}
