"""Which groups to train on, and what long answers cost: host numpy.

Filters read raw rewards, one row of them per group, before any normalization
(after it every group looks equally uncertain).  Leaves out resampling
(`train/collect.py`) and anything on devices.  Invariant: what comes back are
group indices or per-episode numbers; nothing is reordered or changed in place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

TOLERANCE = 1e-6
MEASURES = ('std', 'mean', 'sum')

# These judge each group by itself, so that more groups can be asked for; the
# others rank the groups of one batch.
RESAMPLING = ('dynamic_sampling', 'accuracy_band')

# These take shares of scores, which mean nothing where one is negative.
_SHARES_OF_SCORES = ('min_p', 'top_p')


@dataclasses.dataclass(frozen=True)
class FilterOptions:
  """Which groups are kept.

  Attributes:
    name: Key of FILTERS.
    value: Its parameter: kept share (top_share, top_p), number of groups
      (top_count), share of the largest score (min_p).
    measure: What ranks a group: 'std', 'mean' or 'sum' of its rewards; min_p
      and top_p read the std alone.
    smallest: Keep the smallest scores instead.
    zeros: False drops groups of score 0 first.
    tries: Waves of tasks that a filter in RESAMPLING may play for a batch.
    band_low: accuracy_band keeps groups of at least this mean metric.
    band_high: accuracy_band keeps groups of at most this mean metric.
  """

  name: str = 'none'
  value: float = 0.9
  measure: str = 'std'
  smallest: bool = False
  zeros: bool = True
  tries: int = 10
  band_low: float = 0.2
  band_high: float = 0.8

  def __post_init__(self):
    if self.name not in FILTERS:
      raise ValueError(
          f'filter.name={self.name!r} is none of {", ".join(FILTERS)}'
      )
    if self.measure not in MEASURES:
      raise ValueError(
          f'filter.measure={self.measure!r} is none of {", ".join(MEASURES)}'
      )
    if not self.value > 0:
      raise ValueError(f'filter.value={self.value} must be above 0')
    shares = ('top_share', 'top_p', 'top_p_softmax', 'min_p')
    if self.name in shares and self.value > 1:
      raise ValueError(
          f'filter.value={self.value} is a share with'
          f' filter.name={self.name!r} and cannot exceed 1'
      )
    if self.name in _SHARES_OF_SCORES and self.measure != 'std':
      raise ValueError(
          f'filter.measure={self.measure!r} with filter.name={self.name!r},'
          ' which takes shares of scores: of negative ones it would keep'
          " nothing; use measure='std', or 'top_share', 'top_count' or"
          " 'top_p_softmax'"
      )
    if self.name == 'top_p' and self.smallest and self.zeros and self.value < 1:
      raise ValueError(
          "filter.smallest with filter.name='top_p', which stops at the first"
          ' group of score 0 and would keep nothing: set filter.zeros=False'
      )
    if self.tries < 1:
      raise ValueError(f'filter.tries={self.tries} must be at least 1')
    if not 0 <= self.band_low <= self.band_high <= 1:
      raise ValueError(
          f'filter.band_low={self.band_low}, filter.band_high='
          f'{self.band_high}: 0 <= low <= high <= 1'
      )

  @property
  def resamples(self) -> bool:
    """Whether what is dropped is made up for by new tasks."""
    return self.name in RESAMPLING


def group_scores(rewards_GxN: np.ndarray, measure: str) -> np.ndarray:
  """Unbiased std, mean or sum of each group: float64 [G].

  NaN entries are members that failed and do not count; a group of nothing else
  has no score: NaN.
  """
  rewards_GxN = np.asarray(rewards_GxN, np.float64)
  counted_GxN = ~np.isnan(rewards_GxN)
  count_G = counted_GxN.sum(axis=1)
  sum_G = np.where(counted_GxN, rewards_GxN, 0).sum(axis=1)
  sum_G[count_G == 0] = np.nan
  if measure == 'sum':
    return sum_G
  mean_G = sum_G / np.maximum(count_G, 1)
  if measure == 'mean':
    return mean_G
  centered_GxN = np.where(counted_GxN, rewards_GxN - mean_G[:, None], 0)
  std_G = np.sqrt((centered_GxN**2).sum(axis=1) / np.maximum(count_G - 1, 1))
  return np.where(count_G > 0, std_G, np.nan)


def _ranked(scores_G: np.ndarray, options: FilterOptions) -> np.ndarray:
  """Groups that have a score, best first, ties by index; no zeros if asked."""
  sign = 1 if options.smallest else -1
  order = np.argsort(sign * scores_G, kind='stable')
  order = order[~np.isnan(scores_G[order])]
  if not options.zeros:
    order = order[np.abs(scores_G[order]) > 1e-10]
  return order


def everything(rewards_GxN, metric_GxN, options: FilterOptions) -> np.ndarray:
  """All groups."""
  del metric_GxN, options
  return np.arange(len(rewards_GxN))


def dynamic_sampling(
    rewards_GxN, metric_GxN, options: FilterOptions
) -> np.ndarray:
  """Groups whose metric differs inside (DAPO, Yu et al. 2025, eq. 11).

  On the unshaped metric: length shaping makes all-wrong groups look diverse.
  Equal is up to 1e-6; a group of one is never kept, as it has no baseline.
  """
  del rewards_GxN, options
  spread_G = np.array(
      [np.ptp(row[~np.isnan(row)]) if (~np.isnan(row)).any() else 0.0
       for row in np.asarray(metric_GxN, np.float64)]
  )  # fmt: skip
  return np.flatnonzero(spread_G > TOLERANCE)


def accuracy_band(
    rewards_GxN, metric_GxN, options: FilterOptions
) -> np.ndarray:
  """Groups whose mean metric lies in the band (ZeroTIR: 0.2 to 0.8).

  A group of failures alone has no mean and is not kept.
  """
  del rewards_GxN
  mean_G = group_scores(metric_GxN, 'mean')
  low, high = options.band_low - TOLERANCE, options.band_high + TOLERANCE
  return np.flatnonzero((mean_G >= low) & (mean_G <= high))


def top_share(rewards_GxN, metric_GxN, options: FilterOptions) -> np.ndarray:
  """The best `value` of the groups with a score, rounded down, at least one.

  StarPO-S keeps the quarter of largest std (Wang et al. 2025,
  arXiv 2504.20073).
  """
  del metric_GxN
  scores_G = group_scores(rewards_GxN, options.measure)
  # Rounding first: 0.7 * 10 is 6.999... in binary.
  scored = np.count_nonzero(~np.isnan(scores_G))
  count = max(1, math.floor(round(options.value * scored, 9)))
  return _ranked(scores_G, options)[:count]


def top_count(rewards_GxN, metric_GxN, options: FilterOptions) -> np.ndarray:
  """The best `value` groups."""
  del metric_GxN
  scores_G = group_scores(rewards_GxN, options.measure)
  return _ranked(scores_G, options)[: max(1, int(options.value))]


def min_p(rewards_GxN, metric_GxN, options: FilterOptions) -> np.ndarray:
  """Groups of at least `value` times the largest std (RAGEN-2)."""
  del metric_GxN
  scores_G = group_scores(rewards_GxN, options.measure)
  order = _ranked(scores_G, options)
  if not len(order):
    return order
  bound = options.value * scores_G[order].max()
  return order[scores_G[order] >= bound]


def top_p(rewards_GxN, metric_GxN, options: FilterOptions) -> np.ndarray:
  """The best groups that hold `value` of all std (RAGEN-2, linear).

  Stops at the first score of 0, and keeps nothing when even all before it do
  not hold that share.  A share of 1 keeps all.
  """
  del metric_GxN
  scores_G = group_scores(rewards_GxN, options.measure)
  order = _ranked(scores_G, options)
  if options.value >= 1:
    return order
  target = options.value * scores_G[order].sum() - 0.01
  held, chosen = 0.0, []
  for group in order:
    if scores_G[group] <= 0:
      break
    chosen.append(group)
    held += scores_G[group]
    if held >= target:
      return np.array(chosen, np.int64)
  return np.zeros((0,), np.int64)


def top_p_softmax(
    rewards_GxN, metric_GxN, options: FilterOptions
) -> np.ndarray:
  """The best groups that hold `value` of the softmax of scores."""
  del metric_GxN
  scores_G = group_scores(rewards_GxN, options.measure)
  order = _ranked(scores_G, options)
  if not len(order):
    return order
  signed = scores_G[order] * (-1 if options.smallest else 1)
  weight = np.exp(signed - signed.max())
  held = np.cumsum(weight / weight.sum())
  return order[: int(np.searchsorted(held, options.value - 1e-12)) + 1]


FILTERS: dict[str, Callable] = {
    'none': everything,
    'dynamic_sampling': dynamic_sampling,
    'accuracy_band': accuracy_band,
    'top_share': top_share,
    'top_count': top_count,
    'min_p': min_p,
    'top_p': top_p,
    'top_p_softmax': top_p_softmax,
}


_RANKING = ('value', 'measure', 'smallest', 'zeros')

_SHARING = ('value', 'zeros')

# Which options each filter reads beside its name.
READ: dict[str, tuple[str, ...]] = {
    'none': (),
    'dynamic_sampling': ('tries',),
    'accuracy_band': ('tries', 'band_low', 'band_high'),
    'top_share': _RANKING,
    'top_count': _RANKING,
    'min_p': _SHARING,
    'top_p': (*_SHARING, 'smallest'),
    'top_p_softmax': _RANKING,
}


def kept_groups(
    rewards_GxN: np.ndarray, metric_GxN: np.ndarray, options: FilterOptions
) -> np.ndarray:
  """Indices of the groups to train on, in batch order.

  Args:
    rewards_GxN: Raw rewards, NaN for members that failed.
    metric_GxN: The unshaped metric in [0, 1], likewise.
    options: Which filter.
  """
  chosen = FILTERS[options.name](rewards_GxN, metric_GxN, options)
  return np.sort(chosen)


def overlong_penalty(
    tokens_N: np.ndarray, limit: int, buffer: int, factor: float
) -> np.ndarray:
  """Soft penalty for answers near the limit (DAPO, Yu et al. 2025, eq. 13).

  0 up to limit - buffer tokens, falling to -factor at limit and beyond.

  Args:
    tokens_N: Sampled tokens of each episode (a tool's are not its fault).
    limit: Tokens at which the whole penalty applies.
    buffer: Tokens over which it grows.
    factor: Its size.

  Raises:
    ValueError: buffer does not lie in (0, limit].
  """
  if not 0 < buffer <= limit:
    raise ValueError(
        f'overlong buffer={buffer} must be above 0 and at most limit={limit}'
    )
  over = (np.asarray(tokens_N, np.float64) - (limit - buffer)) / buffer
  return -factor * np.clip(over, 0, 1)
