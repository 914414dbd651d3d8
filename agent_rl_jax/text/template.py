"""A checkpoint's Jinja template, rendered with dummies to learn its layout.

The template never sees what a user or a tool wrote: each shape of conversation
is rendered once with placeholders, and the text around them is kept.  What a
template does to a content (trimming, JSON quoting) is found by probing and done
here.  Left out: structured tool calls in messages (the policy's turns are text).
Invariant: for a conversation of plain contents, the parts of its layout joined
with the contents are what the template renders.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Turn = tuple[str, str]  # role and content, with placeholders


@dataclasses.dataclass(frozen=True)
class Slot:
  """A place for a content.

  Attributes:
    index: Which content.
    change: What the template does to it.
  """

  index: int
  change: Callable[[str], str]


_CHANGES: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: text.strip(),
    lambda text: text.lstrip(),
    lambda text: text.rstrip(),
    lambda text: text.strip('\n'),
    lambda text: text.lstrip('\n'),
    lambda text: text.rstrip('\n'),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)

SLOT = re.compile(r'slotq7x([0-9]+)x7qtols')


def placeholder(index: int) -> str:
  """Returns the text that stands for content `index`."""
  return f'slotq7x{index}x7qtols'


Part = str | Slot


class TemplateError(ValueError):
  """The template refuses a conversation, or cannot be used here."""


class Template:
  """One template with its variables.

  Attributes:
    digest: Hash of the source, for the run's record.
  """

  def __init__(self, source: str, variables: Mapping[str, Any]):
    """Compiles the source as `transformers` does, in a sandbox.

    No clock is handed in: a template that prints the date prints the same one
    every day (give `date_string` among the variables).

    Raises:
      TemplateError: The source is not valid Jinja.
    """
    import jinja2  # only needed with a checkpoint's template
    from jinja2 import sandbox

    self.digest = hashlib.sha256(source.encode()).hexdigest()
    self._variables = dict(variables)
    self._errors = (jinja2.TemplateError, TypeError, KeyError, AttributeError)
    self._layouts: dict[Any, tuple[Part, ...]] = {}
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=['jinja2.ext.loopcontrols'],
    )
    environment.filters['tojson'] = _tojson
    environment.globals['raise_exception'] = _raise
    # Marks for training masks, which are built from ids here.
    source = re.sub(
        r'\{%(-?)\s*generation\s*(-?)%\}', r'{%\1 if true \2%}', source
    )
    source = re.sub(
        r'\{%(-?)\s*endgeneration\s*(-?)%\}', r'{%\1 endif \2%}', source
    )
    try:
      self._template = environment.from_string(source)
    except jinja2.TemplateError as error:
      raise TemplateError(f'the chat template is not valid: {error}') from error

  def render(
      self,
      turns: Sequence[Turn],
      tools: Sequence[Mapping[str, Any]] | None = None,
      header: bool = False,
  ) -> str:
    """Returns the text of a conversation; only for start-up and for tests.

    Args:
      turns: (role, content) of each message.
      tools: Specifications; None when there are none (an empty list makes some
        templates announce tools).
      header: Whether the header of the next assistant turn follows.

    Raises:
      TemplateError: The template refuses the conversation.
    """
    messages = [{'role': role, 'content': content} for role, content in turns]
    try:
      return self._template.render(
          messages=messages,
          tools=list(tools) if tools else None,
          add_generation_prompt=header,
          **self._variables,
      )
    except self._errors as error:
      roles = ', '.join(role for role, _ in turns)
      raise TemplateError(
          f'the chat template refuses the roles {roles}: {error}'
      ) from error

  def layout(
      self,
      turns: Sequence[Turn],
      tools: Sequence[Mapping[str, Any]] | None = None,
  ) -> tuple[Part, ...]:
    """Returns texts and slots, in the order of the page, header included.

    Rendered once for each shape of conversation, then remembered.

    Raises:
      TemplateError: The template drops, repeats or rewrites a content.
    """
    key = (tuple(turns), json.dumps(tools, sort_keys=False, default=str))
    if key not in self._layouts:
      self._layouts[key] = self._derive(turns, tools)
    return self._layouts[key]

  def _derive(self, turns, tools) -> tuple[Part, ...]:
    plain = self.render(turns, tools, header=True)
    wanted = [int(i) for _, content in turns for i in SLOT.findall(content)]
    found = [int(match.group(1)) for match in SLOT.finditer(plain)]
    if sorted(found) != sorted(wanted):
      index = next(i for i in wanted if found.count(i) != 1)
      role = next(r for r, c in turns if placeholder(index) in c)
      raise TemplateError(
          f'the chat template prints the content of a message of role {role!r}'
          f' {found.count(index)} times, so it cannot be laid out'
      )
    changes = {
        index: self._change(turns, tools, plain, index) for index in wanted
    }
    parts: list[Part] = []
    start = 0
    for match in SLOT.finditer(plain):
      parts.append(plain[start : match.start()])
      index = int(match.group(1))
      parts.append(Slot(index, changes[index]))
      start = match.end()
    return (*parts, plain[start:])

  def _change(self, turns, tools, plain, index) -> Callable[[str], str]:
    """Finds what the template does to content `index` by padding it."""
    mark = placeholder(index)
    padded = f'\n \n"{mark}"\n \n'
    rendered = self.render(
        [(role, content.replace(mark, padded)) for role, content in turns],
        tools,
        header=True,
    )
    for change in _CHANGES:
      if rendered == plain.replace(mark, change(padded)):
        return change
    role = next(r for r, c in turns if mark in c)
    raise TemplateError(
        f'the chat template rewrites the content of a message of role {role!r}'
        ' in a way that is not known here (neither trimming nor JSON quoting)'
    )


def _raise(message: str):
  import jinja2

  raise jinja2.TemplateError(message)


def _tojson(
    value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
) -> str:
  """The filter of `transformers`: no HTML escapes, key order kept."""
  return json.dumps(
      value,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
  )


def check_append_safe(
    template: Template, opening: Sequence[Turn], results: Sequence[Turn]
) -> str:
  """Refuses a template under which earlier text would change, or turns differ.

  Renders conversations that grow by one step, with and without thoughts, and
  compares each with the one before.

  Args:
    template: The template.
    opening: Turns before the first assistant turn.
    results: Turns that answer a call (all of one round).

  Returns:
    What the template prints behind an assistant's content.

  Raises:
    TemplateError: The first difference, in words.
  """
  ends = set()
  ask = [('user', 'And then?')]
  for said in ('Yes.', '<think>\nHm.\n</think>\n\nYes.'):
    for answers in ((results, results), (ask, ask), (results, ask)):
      turns = list(opening)
      for answer in (*answers, ()):
        before = template.render(turns, header=True)
        turns.append(('assistant', said))
        after = template.render(turns)
        head, _, end = after.rpartition(said)
        if head != before:
          raise TemplateError(
              'the chat template is not append-safe: an assistant turn is not'
              ' the generation prompt followed by its content; after'
              f' {_tail(before)!r} it prints {after[_same(before, after):]!r}'
              f' for the content {said!r}'
          )
        ends.add(end)
        if not answer:
          continue
        turns.extend(answer)
        grown = template.render(turns)
        if not grown.startswith(after):
          at = _same(after, grown)
          raise TemplateError(
              'the chat template is not append-safe: a message of role'
              f' {answer[0][0]!r} changes the text before it, from'
              f' {after[at : at + 60]!r} to {grown[at : at + 60]!r}'
          )
        if not template.render(turns, header=True).startswith(grown):
          raise TemplateError(
              'the chat template is not append-safe: the generation prompt'
              ' changes the text before it'
          )
  if len(ends) != 1:
    raise TemplateError(
        'the chat template ends assistant turns in more than one way:'
        f' {sorted(ends)}'
    )
  return ends.pop()


def _same(one: str, two: str) -> int:
  """Length of the common beginning."""
  pairs = zip(one, two, strict=False)
  return next(
      (k for k, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two))
  )


def _tail(text: str) -> str:
  return text[-40:]
