"""The `template` protocol: a checkpoint's own chat layout, plus a tool dialect.

The template is laid out with placeholders (text/template.py); at run time only
contents are encoded, with marks off, and put between the ids of the layout.

Dialects, how a call and its result look:
  code_block  a fenced ```python block in the assistant's turn, which ends with
              the closing fence; results are a user's turn with an ```output
              block.  For models whose template knows no tools.
  hermes      <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any
              number in a turn; results are the template's own tool turn where
              that is a <tool_response>, else a user's turn with one.

Left out: Llama's bare-JSON calls and DeepSeek's.  Invariant: prompt, actions
and observations put behind one another decode to what the template renders for
the same messages (up to what it trims or quotes), up to the last turn's end.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agent_rl_jax import types
from agent_rl_jax.text import dialects, parsers, stops, template, vocabulary
from agent_rl_jax.text import format as chat_format


@dataclasses.dataclass(frozen=True)
class TemplateOptions:
  """Choices of the `template` protocol.

  Attributes:
    template: Jinja source, or the path of a file that holds it; '' takes the
      one that came with the tokenizer.
    variables: Further variables of the template (bos_token, date_string, ...).
    tool_dialect: 'code_block' or 'hermes' (see the module).
    code_tool: Name of the tool that code blocks call.
    describe_tools: Whether the prompt says how to call the tools.
    instructions: That text, in which {tools} becomes one JSON line per tool;
      None takes the template's or else the dialect's own.
    system: System message of conversations that bring none; '' for none.
    stop_tokens: Further marks that end a turn; None takes the known ones that
      the vocabulary has.
    stop_strings: Strings that end a turn; None takes the dialect's own.
    max_observation_tokens: Longest tool or environment text in tokens; longer
      ones lose their middle.
  """

  template: str = ''
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tool_dialect: str = 'code_block'
  code_tool: str = 'python'
  describe_tools: bool = True
  instructions: str | None = None
  system: str = ''
  stop_tokens: Sequence[str] | None = None
  stop_strings: Sequence[str] | None = None
  max_observation_tokens: int = 512

  def __post_init__(self):
    if self.tool_dialect not in dialects.DIALECTS:
      raise ValueError(
          f'tool_dialect={self.tool_dialect!r} is none of {sorted(dialects.DIALECTS)}'
      )
    if self.max_observation_tokens < 1:
      raise ValueError(
          f'max_observation_tokens={self.max_observation_tokens} must be at'
          ' least 1'
      )


class TemplateChat:
  """ChatFormat of a checkpoint's template (see the module).

  Attributes:
    digest: Hash of the template's source, for the run's record.
  """

  def __init__(self, tokenizer: vocabulary.Tokenizer, **options):
    """Takes the fields of TemplateOptions as options.

    Raises:
      TemplateError: The template is not append-safe, or cannot be laid out.
      ValueError: No template, or a mark that the vocabulary lacks.
    """
    self.tokenizer = tokenizer
    self.options = TemplateOptions(**options)
    self._template = template.Template(
        _source(self.options.template, tokenizer),
        {**tokenizer.special, **self.options.variables},
    )
    self.digest = self._template.digest
    self._said = [mark for mark in dialects.SAID if mark in tokenizer.control]
    self._hermes = self.options.tool_dialect == 'hermes'
    mark = template.placeholder(0)
    self._takes_system = self._prints([('system', mark), ('user', 'U')], mark)
    self._opening = [('system', 'S')] * self._takes_system + [('user', 'U')]
    self._native_results = self._hermes and self._prints(
        [*self._opening, ('assistant', 'A'), ('tool', mark)],
        f'<tool_response>\n{mark}\n</tool_response>',
    )
    # Llama's templates ask for calls of another form, so they do not count.
    self._native_tools = self._hermes and self._prints(
        self._opening, '<tool_call>', [_as_function({'name': 'T'})]
    )
    results = [{'role': 'tool', 'content': 'R'}] * (1 + self._hermes)
    behind = template.check_append_safe(
        self._template, self._opening, self._turns(results)[0]
    )
    self._end = next(
        (m for m in tokenizer.control if m and behind.startswith(m)), None
    )
    if self._end is None:
      raise template.TemplateError(
          f'the chat template ends an assistant turn with {behind!r}, which'
          ' does not begin with a control token of this tokenizer; give the'
          ' tokenizer that belongs to it (for a .model file, name the mark in'
          ' control=...)'
      )
    self._set_stops()

  def prompt(
      self,
      messages: Sequence[types.Message],
      tools: Sequence[Mapping[str, Any]] = (),
  ) -> np.ndarray:
    """Returns int32 ids of the opening, the assistant's header included.

    Raises:
      TemplateError: The template refuses the messages.
      ValueError: A tool's specification spells a mark.
    """
    messages, specs = self._with_tools(messages, tools)
    turns, contents = self._turns(messages)
    ids = []
    for part in self._template.layout(turns, specs):
      if isinstance(part, str):
        ids += self.tokenizer.encode_marked(part)
        continue
      role, text = contents[part.index]
      marks = self._said if role == 'assistant' else ()
      ids += self.tokenizer.encode_marked(part.change(text), marks)
    return vocabulary.int32(ids)

  def observation(
      self, obs: types.Observation, last: int | None = None
  ) -> np.ndarray:
    """Returns int32 ids of what the environment said, up to the next header.

    Args:
      obs: Messages, or ids of a world, which are passed on as they are.
      last: Last id of the action that it answers: a turn that a stop string or
        a limit ended still lacks its end mark, which is then put in here.

    Raises:
      ValueError: `last` is missing.
    """
    if obs.ids is not None:
      return np.asarray(obs.ids, np.int32)
    if obs.done:
      return np.zeros(0, np.int32)
    if last is None:
      raise ValueError(
          'observation(obs, last): a template needs the last id of the action'
          ' to know whether its turn was ended'
      )
    turns, contents = self._turns(obs.messages, 1)
    said = ('assistant', template.placeholder(0))
    parts = self._template.layout((*self._opening, said, *turns))
    start = next(
        k for k, p in enumerate(parts) if not isinstance(p, str) and not p.index
    )
    ids = [] if last in self._ends else [self.tokenizer.control[self._end]]
    behind = parts[start + 1].removeprefix(self._end)
    ids += self.tokenizer.encode_marked(behind)
    for part in parts[start + 2 :]:
      if isinstance(part, str):
        ids += self.tokenizer.encode_marked(part)
      else:
        ids += chat_format.clip(
            self.tokenizer,
            part.change(contents[part.index - 1][1]),
            self.options.max_observation_tokens,
        )
    return vocabulary.int32(ids)

  def action(
      self, ids: Sequence[int] | np.ndarray, finish: str
  ) -> types.Action:
    r"""Parses a turn in the tool dialect; an answer is what it boxes.

    What the last token holds beyond a stop string is shown in `text` and not
    parsed.

    Args:
      ids: The sampled ids, the one that ended the turn included.
      finish: 'stop', or 'length' when a limit cut the turn.

    Returns:
      The action; `error` is set when there is neither a call nor one answer.
    """
    ids = [int(i) for i in ids]
    text = self.tokenizer.decode(ids)
    stop = stops.find_stop(
        self.tokenizer, ids, self.stop_ids, self.stop_strings
    )
    if finish == 'length' or stop is None:
      return types.Action(text, error=chat_format.CUT_OFF)
    if ids[-1] in self._ends:
      ids.pop()
    body = self.tokenizer.text_bytes(ids)
    body = body[: len(body) - len(stop.rest)].decode('utf-8', 'replace')
    spoken = parsers.without_thoughts(body)
    if spoken is None:
      return types.Action(text, error='A <think> is not closed with </think>.')
    if self._hermes:
      found, rest, error = parsers.hermes_calls(spoken)
    else:
      code, rest, error = parsers.code_block(spoken)
      name = self.options.code_tool
      found = [] if code is None else [(name, {'code': code})]
    if error:
      return types.Action(text, error=error)
    if found:
      calls = [types.ToolCall(str(k), *call) for k, call in enumerate(found)]
      return types.Action(text, tool_calls=tuple(calls))
    answer, error = parsers.answer_of(rest)
    return types.Action(text, answer=answer, error=error)

  def demonstration(
      self,
      messages: Sequence[types.Message],
      tools: Sequence[Mapping[str, Any]] = (),
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids int32 [T], mask bool [T]); see format.assemble."""
    return chat_format.assemble(self, messages, tools)

  def written(self, content: str) -> list[int]:
    """Returns the ids that a policy would sample to say `content`.

    Ends with the end of turn, or where a stop string ends it.

    Raises:
      ValueError: Text follows a stop, where a sampled turn would have ended.
    """
    if self.options.tool_dialect == 'code_block' and content.endswith('\n```'):
      content += '\n'
    ids = self.tokenizer.encode_marked(content, self._said)
    stop = stops.find_stop(
        self.tokenizer, ids, self.stop_ids, self.stop_strings
    )
    if stop is None:
      return [*ids, self.tokenizer.control[self._end]]
    if stop.index != len(ids) - 1 or stop.rest:
      raise ValueError(
          f'text follows the stop {stop.string!r} in the assistant turn'
          f' {content!r}; put the rest into the next turn'
      )
    return ids

  def _prints(self, turns, text: str, tools=None) -> bool:
    """Whether the template takes `turns` and prints `text`."""
    try:
      return text in self._template.render(turns, tools, header=True)
    except template.TemplateError:
      return False

  def _set_stops(self) -> None:
    control = self.tokenizer.control
    marks = self.options.stop_tokens
    if marks is None:
      marks = [mark for mark in dialects.KNOWN_ENDS if mark in control]
    if unknown := [mark for mark in marks if mark not in control]:
      raise ValueError(
          f'stop_tokens: {unknown[0]!r} is not a control token of the tokenizer'
      )
    self._ends = {control[mark] for mark in (self._end, *marks)}
    strings = self.options.stop_strings
    if strings is None:
      strings = dialects.DIALECTS[self.options.tool_dialect][2]
    # A string that is one token of the vocabulary is sampled as that token.
    extra = {control[text] for text in strings if text in control}
    self.stop_ids = tuple(sorted(self._ends | extra))
    self.stop_strings = tuple(s for s in strings if s not in control)

  def _turns(
      self, messages: Sequence[types.Message], first: int = 0
  ) -> tuple[list[template.Turn], list[tuple[str, str]]]:
    """Puts placeholders for contents, and tool results into their wrappers.

    Returns:
      Turns of the template, and (role, content) of each placeholder, which are
      numbered from `first`.
    """
    before, after, _ = dialects.DIALECTS[self.options.tool_dialect]
    turns: list[template.Turn] = []
    contents: list[tuple[str, str]] = []
    previous = None
    for message in messages:
      role, text = message['role'], message['content']
      slot = template.placeholder(first + len(contents))
      if role == 'tool' and not self._native_results:
        wrapped = f'{before}{slot}{after}'
        if previous == 'tool':  # all results of a round share a turn
          wrapped = f'{turns.pop()[1]}\n{wrapped}'
        turns.append(('user', wrapped))
        contents.append((role, text.rstrip('\n')))
      elif text:
        turns.append((role, slot))
        contents.append((role, text))
      else:
        turns.append((role, ''))
      previous = role
    return turns, contents

  def _with_tools(
      self,
      messages: Sequence[types.Message],
      tools: Sequence[Mapping[str, Any]],
  ) -> tuple[list[types.Message], list[Mapping[str, Any]] | None]:
    """Returns the messages with what is said about tools, or specs to print."""
    options, specs = self.options, None
    messages = list(messages)
    if options.system and (not messages or messages[0]['role'] != 'system'):
      messages.insert(0, {'role': 'system', 'content': options.system})
    if tools and options.describe_tools:
      functions = [_as_function(tool) for tool in tools]
      if self._native_tools and options.instructions is None:
        specs = functions
        for mark in self.tokenizer.control:
          if mark in json.dumps(functions, ensure_ascii=False):
            raise ValueError(
                f'the specification of a tool spells the control token {mark!r};'
                ' reword it'
            )
      else:
        text = options.instructions
        if text is None:
          text = (
              dialects.HERMES_INSTRUCTIONS
              if self._hermes
              else dialects.CODE_INSTRUCTIONS
          )
        lines = '\n'.join(json.dumps(f, ensure_ascii=False) for f in functions)
        text = text.replace('{tools}', lines)
        messages = chat_format.add_to_system(messages, text)
    if not self._takes_system and messages[0]['role'] == 'system':
      system, user, *others = messages
      text = f'{system["content"]}\n\n{user["content"]}'
      messages = [{**user, 'content': text}, *others]
    return messages, specs


def _as_function(spec: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns a specification in the form that templates expect."""
  return {'type': 'function', 'function': dict(spec)}


def _source(given: str, tokenizer: vocabulary.Tokenizer) -> str:
  """Returns the template's source from an option: source, path or ''."""
  if not given:
    if tokenizer.chat_template is None:
      raise ValueError(
          "chat template='' takes the tokenizer's own, but it has none; give"
          ' the source or the path of a .jinja file'
      )
    return tokenizer.chat_template
  if '{%' in given or '{{' in given:
    return given
  return pathlib.Path(given).read_text()
