"""Chat formats by name: `tags` (by hand) and `template` (of a checkpoint).

Left out: what a format does (its own file).  Invariant: all of them fill
`format.ChatFormat`.
"""

from __future__ import annotations

import difflib

from agent_rl_jax.text import format as chat_format
from agent_rl_jax.text import tag_chat, tags, template_chat, vocabulary

ChatFormat = chat_format.ChatFormat
TagChat = tag_chat.TagChat
TemplateChat = template_chat.TemplateChat
TAG_CONTROL = tags.TAG_CONTROL

CHATS = {
    'tags': TagChat,
    'template': TemplateChat,
}


def make_chat(
    kind: str, tokenizer: vocabulary.Tokenizer, **options
) -> ChatFormat:
  """Returns the chat format `kind` over `tokenizer`.

  Args:
    kind: A key of CHATS.
    tokenizer: Must hold the marks of the format.
    **options: Fields of the format's options.

  Raises:
    ValueError: No such format, or a tokenizer or option that does not fit.
  """
  if kind not in CHATS:
    near = difflib.get_close_matches(kind, CHATS, 1, 0)[0]
    raise ValueError(
        f'unknown chat format {kind!r}; did you mean {near!r}? There are'
        f' {sorted(CHATS)}'
    )
  return CHATS[kind](tokenizer, **options)
