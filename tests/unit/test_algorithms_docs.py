"""docs/algorithms.md names every registry key, and nothing else."""

import pathlib
import re

import pytest

from agent_rl_jax.algorithms import aggregate, choices, filters, kl
from agent_rl_jax.algorithms.advantages import ADVANTAGES
from agent_rl_jax.algorithms.losses import LOSSES

DOCS = pathlib.Path(__file__).resolve().parents[2] / 'docs' / 'algorithms.md'

# First cell of a table's head -> what its rows must name.
TABLES = {
    ('Advantage estimators', 'Name'): ADVANTAGES,
    ('Policy losses', 'Name'): LOSSES,
    ('Policy losses', 'Aggregation'): aggregate.AGGREGATIONS,
    ('Policy losses', 'KL'): kl.KL,
    ('Corrections', 'Correction'): choices.CORRECTION_BOUNDS,
    ('Corrections', 'Rejection'): choices.REJECTION_BOUNDS,
    ('Filters', 'Filter'): filters.FILTERS,
}


def _tables():
  """{(section, first head cell): [cells of each row]}."""
  found, section, rows = {}, '', None
  for line in DOCS.read_text('utf-8').splitlines():
    if line.startswith('## '):
      section = line[3:]
    if not line.startswith('|'):
      rows = None
      continue
    cells = [cell.strip() for cell in line.strip('|').split('|')]
    if rows is None:
      rows = found.setdefault((section, cells[0]), [])
      width = len(cells)
    elif not set(line) <= set('|- '):
      assert len(cells) == width, line
      rows.append(cells)
  return found


@pytest.mark.parametrize('table', TABLES, ids=' '.join)
def test_every_key_is_in_the_table_and_nothing_else(table):
  rows = _tables()[table]
  named = [name for row in rows for name in re.findall('`([^`]+)`', row[0])]
  assert sorted(named) == sorted(TABLES[table])


@pytest.mark.parametrize(
    'section', ['Advantage estimators', 'Policy losses', 'Filters']
)
def test_each_row_says_what_it_is_and_costs(section):
  head = 'Filter' if section == 'Filters' else 'Name'
  for name, equation, *_, cost in _tables()[section, head]:
    assert equation, name
    assert cost or name == '`sft`', name


def test_it_says_when_losses_cannot_differ():
  text = DOCS.read_text('utf-8')
  assert 'One update per rollout batch makes all ratios one' in text
