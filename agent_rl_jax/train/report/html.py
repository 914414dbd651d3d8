"""A static page to read trajectories: no script, no server, no network.

Action tokens, observation tokens and the prompt are told apart by background,
advantages by an underline, rewards by chips.  Leaves out any choice of what is
shown.  Invariant: text of a model or tool reaches the page escaped, with
control and direction-changing characters made visible, and the page's own
policy forbids scripts and loads.
"""

from __future__ import annotations

import html
import math
import os
import unicodedata
from collections.abc import Sequence

from agent_rl_jax.train import whole_file
from agent_rl_jax.train.report.trajectories import Piece, TrajectoryRecord

_STYLE = """
:root { color-scheme: light dark; --fg: #1c1e21; --bg: #ffffff;
  --soft: #f3f4f6; --line: #d5d8dd; --dim: #666c75; --action: #dbe8ff;
  --observation: #ffedc7; --good: #128a3e; --bad: #c62828; }
@media (prefers-color-scheme: dark) { :root { --fg: #e4e6ea; --bg: #16181c;
  --soft: #22252b; --line: #3a3e46; --dim: #9aa0aa; --action: #1f3a66;
  --observation: #57430f; --good: #4cc97a; --bad: #ff7a70; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; color: var(--fg);
  background: var(--bg); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .3rem; }
p { margin: 0 0 1rem; color: var(--dim); }
.legend { position: sticky; top: 0; padding: .5rem 0; display: flex; gap: 1rem;
  flex-wrap: wrap; background: var(--bg); border-bottom: 1px solid var(--line);
  margin-bottom: 1rem; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; }
summary { cursor: pointer; padding: .45rem .7rem; display: flex; gap: .5rem;
  flex-wrap: wrap; align-items: baseline; }
summary::before { content: '▸'; color: var(--dim); }
details[open] > summary::before { content: '▾'; }
summary b { min-width: 9rem; overflow-wrap: anywhere; }
dl { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: 0;
  padding: .5rem .7rem; border-top: 1px solid var(--line);
  background: var(--soft); font-size: 13px; }
dl div { display: flex; gap: .4rem; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
pre { margin: 0; padding: .8rem .7rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.9 ui-monospace, monospace;
  border-top: 1px solid var(--line); }
i { font-style: normal; border-bottom: 3px solid transparent; }
i:hover { outline: 1px solid var(--fg); }
.p { color: var(--dim); } .a { background: var(--action); }
.o { background: var(--observation); }
.u { opacity: .55; font-size: .85em; }
.chip { border-radius: 99px; padding: 0 .55rem; font-size: 13px;
  border: 1px solid var(--line); background: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); }
.chip.good, .chip.bad { border-color: currentColor; }
"""

_CLASSES = {'prompt': 'p', 'action': 'a', 'observation': 'o'}

# Alone they would vanish or change what stands around them.
_HIDDEN = ('Cc', 'Cf', 'Co', 'Cs', 'Cn', 'Zl', 'Zp')


def visible(text: str) -> str:
  """Returns `text` as HTML: escaped, hidden characters shown as U+....

  Newlines are marked and kept; tabs are kept.
  """
  out = []
  for char in text:
    if char == '\n':
      out.append('<span class="u">↵</span>\n')
    elif char != '\t' and unicodedata.category(char) in _HIDDEN:
      out.append(f'<span class="u">U+{ord(char):04X}</span>')
    else:
      out.append(html.escape(char))
  return ''.join(out)


def _number(value: float) -> str:
  return f'{value:.3g}' if math.isfinite(value) else str(value)


def _sign(value: float) -> str:
  return 'good' if value > 0 else 'bad' if value < 0 else ''


def _token(piece: Piece, scale: float) -> str:
  """One token as a span; the underline's strength is |advantage| / scale."""
  title = [piece.kind]
  if piece.token is not None:
    title.append(f'id {piece.token}')
  if piece.logprob is not None:
    title.append(f'log-prob {_number(piece.logprob)}')
  style = ''
  if piece.advantage is not None:
    title.append(f'advantage {_number(piece.advantage)}')
    if piece.advantage and math.isfinite(piece.advantage):
      share = 30 + round(70 * min(abs(piece.advantage) / scale, 1.0))
      color = f'color-mix(in srgb, var(--{_sign(piece.advantage)}) {share}%,'
      style = f' style="border-color: {color} transparent)"'
  # A token that completes no character still has a place on the page.
  text = visible(piece.text) or '<span class="u">·</span>'
  return (
      f'<i class="{_CLASSES[piece.kind]}" title="{", ".join(title)}"{style}>'
      f'{text}</i>'
  )


def _chip(name: str, value: float) -> str:
  return (
      f'<span class="chip {_sign(value)}">{visible(name)}'
      f' {_number(value)}</span>'
  )


def _entry(number: int, record: TrajectoryRecord, scale: float) -> str:
  chips = [_chip('reward', record.total)]
  chips += [_chip(name, value) for name, value in record.rewards.items()]
  if record.advantage is not None:
    chips.append(_chip('advantage', record.advantage))
  head = ''.join(
      f'<div><dt>{visible(str(name))}</dt><dd>{visible(str(value))}</dd></div>'
      for name, value in record.info.items()
  )
  tokens = ''.join(_token(piece, scale) for piece in record.pieces)
  return (
      f'<details{" open" if number == 0 else ""}><summary>'
      f'<b>{visible(record.task_uid)}</b>'
      f'<span class="chip">{visible(record.status)}</span>{"".join(chips)}'
      f'</summary><dl>{head}</dl><pre>{tokens}</pre></details>\n'
  )


def render(
    records: Sequence[TrajectoryRecord], title: str = 'Trajectories'
) -> str:
  """Returns the page as text."""
  sizes = [
      abs(piece.advantage)
      for record in records
      for piece in record.pieces
      if piece.advantage is not None and math.isfinite(piece.advantage)
  ]
  scale = max(sizes, default=0.0) or 1.0
  good = 'style="border-color: var(--good)"'
  bad = 'style="border-color: var(--bad)"'
  entries = ''.join(
      _entry(number, record, scale) for number, record in enumerate(records)
  )
  return (
      '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
      '<meta http-equiv="Content-Security-Policy" content="default-src'
      " 'none'; style-src 'unsafe-inline'\">\n"
      '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
      f'<title>{visible(title)}</title>\n<style>{_STYLE}</style></head><body>\n'
      f'<h1>{visible(title)}</h1>\n'
      f'<p>{len(records)} episodes. Point at a token for its id, log-prob and'
      ' advantage.</p>\n'
      '<div class="legend"><span><i class="p">prompt</i></span>'
      '<span><i class="a">action (sampled, trained on)</i></span>'
      '<span><i class="o">observation (not trained on)</i></span>'
      f'<span><i class="a" {good}>advantage &gt; 0</i></span>'
      f'<span><i class="a" {bad}>advantage &lt; 0</i></span></div>\n'
      f'{entries}</body></html>\n'
  )


def write_trajectories(
    path: str | os.PathLike,
    records: Sequence[TrajectoryRecord],
    title: str = 'Trajectories',
) -> None:
  """Writes the page, atomically."""
  with whole_file.replacing(path) as partial:
    partial.write_text(render(records, title), encoding='utf-8')
