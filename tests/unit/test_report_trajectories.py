"""Trajectory records and their page: every token, everything escaped."""

import html.parser
import json
import re

import numpy as np

from agent_rl_jax import types
from agent_rl_jax.train.report import html as html_lib
from agent_rl_jax.train.report import trajectories

Piece = trajectories.Piece


class _Bytes:
  """Ids below 256 are bytes, 256 is a control token."""

  def token_bytes(self, token):
    return bytes([token]) if token < 256 else b''

  def decode(self, ids):
    return ''.join('<end>' if i == 256 else chr(i) for i in ids)


def test_a_cut_character_stands_at_the_token_that_completes_it():
  tokens = list('aé'.encode()) + [256]
  assert trajectories.token_texts(tokens, _Bytes()) == ['a', '', 'é', '<end>']


def test_incomplete_bytes_are_shown_as_replacement():
  assert trajectories.token_texts([0xC3, 256, 65], _Bytes()) == [
      '',
      '\ufffd<end>',
      'A',
  ]
  assert trajectories.token_texts([65, 0xC3], _Bytes()) == ['A', '\ufffd']


def _record():
  tokens = np.array(list(b'PPaa') + [256] + list(b'oob') + [256], np.int32)
  mask = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1], bool)
  logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
  action = types.Action('x')
  episode = types.Episode(
      task=types.Task('task-1', 'tool', ()),
      uid=7,
      group=2,
      policy_version=3,
      rows=(types.Row(tokens, mask, logprobs),),
      turns=(types.Turn(0, 2, 5, 7, action), types.Turn(0, 7, 9, 9, action)),
      status=types.Status.DONE,
      rewards={'answer': 1.0},
  )
  return trajectories.make_record(
      episode,
      _Bytes(),
      total=1.0,
      advantages=[np.where(mask, 0.25, 0.0)],
  )


def test_record_holds_every_token_by_kind():
  record = _record()
  assert len(record.pieces) == 9
  kinds = ''.join(piece.kind[0] for piece in record.pieces)
  assert kinds == 'ppaaaooaa'
  for piece in record.pieces:
    sampled = piece.kind == 'action'
    assert (piece.logprob is not None) == sampled
    assert (piece.advantage is not None) == sampled
  assert record.advantage == 0.25
  assert record.info['turns'] == 2 and record.info['action tokens'] == 5


def test_record_as_json_joins_spans():
  line = json.loads(json.dumps(_record().to_json()))
  assert line['text'] == [
      ['prompt', 'PP'],
      ['action', 'aa<end>'],
      ['observation', 'oo'],
      ['action', 'b<end>'],
  ]
  assert line['rewards'] == {'answer': 1.0} and line['status'] == 'done'


HOSTILE = [
    '</script><script>alert(1)</script>',
    '<img src=x onerror=alert(1)>',
    '" onmouseover="x',
    "' style='x",
    '&lt;b&gt;',
    '\x00\x1b[31m\x7f',
    '\u202egnp.exe\u2066',
    '\ud800',
    '-->]]>',
    '<!--',
    'a\r\nb\tc',
]


class _Checker(html.parser.HTMLParser):
  """Collects tags, attributes and the text inside tokens."""

  def __init__(self):
    super().__init__()
    self.tags, self.attributes, self.text = set(), set(), []

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    self.attributes |= {name for name, _ in attrs}

  def handle_data(self, data):
    self.text.append(data)


def _hostile_records():
  return [
      trajectories.TrajectoryRecord(
          task_uid=text,
          pieces=tuple(
              Piece(text, kind, -1.0, 0.5, 3) for kind in trajectories.KINDS
          ),
          rewards={text: float('nan')},
          total=-1.0,
          advantage=float('inf'),
          status=text,
          info={text: text},
      )
      for text in HOSTILE
  ]


def test_no_text_of_an_episode_becomes_markup(tmp_path):
  path = tmp_path / 'page.html'
  html_lib.write_trajectories(path, _hostile_records(), title='a<b>')
  page = path.read_text(encoding='utf-8')
  checker = _Checker()
  checker.feed(page)
  assert checker.tags <= {
      'html', 'head', 'meta', 'title', 'style', 'body', 'h1', 'p', 'div',
      'span', 'i', 'details', 'summary', 'b', 'dl', 'dt', 'dd', 'pre',
  }  # fmt: skip
  assert checker.attributes <= {
      'lang', 'charset', 'http-equiv', 'content', 'name', 'class', 'title',
      'style', 'open',
  }  # fmt: skip
  text = ''.join(checker.text)
  assert '</script><script>alert(1)</script>' in text
  assert not re.search('[\x00-\x08\x0b-\x1f\x7f\u202e\u2066\ud800]', page)
  assert 'U+202E' in text and 'U+0000' in text and 'U+D800' in text


def test_page_loads_nothing():
  page = html_lib.render(_hostile_records())
  assert "default-src 'none'" in page
  assert not re.search(r'(src|href)=[^x]|url\(|@import|https?:', page)


def test_kinds_and_advantages_are_told_apart():
  pieces = (
      Piece('p', 'prompt', None, None, 1),
      Piece('up', 'action', -0.1, 2.0, 2),
      Piece('down', 'action', -0.2, -1.0, 3),
      Piece('o', 'observation', None, None, 4),
      Piece('', 'action', -0.3, 0.0, 5),
  )
  page = html_lib.render(
      [
          trajectories.TrajectoryRecord(
              't', pieces, {'answer': 1.0}, 1.0, 0.5, 'done'
          )
      ]
  )
  spans = re.findall(r'<i class="(.)" title="([^"]*)"([^>]*)>', page)
  assert [span[0] for span in spans] == ['p', 'a', 'a', 'o', 'a']
  assert spans[1][1] == 'action, id 2, log-prob -0.1, advantage 2'
  assert '--good) 100%' in spans[1][2] and '--bad) 65%' in spans[2][2]
  assert spans[0][2] == spans[3][2] == spans[4][2] == ''
  assert '>·</span></i>' in page  # a token without text has a place
