"""Every notebook runs from top to bottom in a fresh kernel."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
  nbformat = pytest.importorskip('nbformat')
  nbclient = pytest.importorskip('nbclient')
  pytest.importorskip('ipykernel')
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  # A kernel is one device, as a reader's is.
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  notebook = nbformat.read(path, as_version=4)
  client = nbclient.NotebookClient(
      notebook,
      timeout=300,
      kernel_name='python3',
      resources={'metadata': {'path': str(ROOT)}},
  )
  client.execute()
  assert any(cell.cell_type == 'code' for cell in notebook.cells)
