"""Package description; tool settings stand in pyproject.toml.

Lower bounds are the oldest versions that the tests ran with, upper bounds stop
before a release that may change what the reason beside them says.
"""

import setuptools

CORE = [
    'absl-py>=2.1',  # entry points and their flags
    # Both ends are tested.  Each minor release may move what shard_map, the
    # mesh axis types and the monitoring events are called.
    'jax>=0.10,<0.13',
    'flax>=0.12,<0.13',  # linen blocks, flax.struct
    'optax>=0.2.8,<0.3',  # contrib.muon with dimension numbers
    # Checkpoint handlers and the manager's asynchronous save.
    'orbax-checkpoint>=0.12,<0.13',
    'numpy>=2.0',  # Generator streams that the data streams are named by
    'ml_collections>=1.1',  # config files and --config.key=value
    'grain>=0.2.18,<0.3',  # its shuffle fixes the order of the tasks
    # as_data_source without TensorFlow; reads array_record files only.
    'tensorflow-datasets>=4.9.9,<5',
    'array_record>=0.8.1',  # the file format behind as_data_source
    'sentencepiece>=0.2.1,<0.3',  # training must give the same pieces
    'tokenizers>=0.21',  # byte-level BPE of tokenizer.json and GGUF
    'gguf>=0.17',  # reads and dequantizes GGUF files
    'jinja2>=3.1.6',  # chat templates of checkpoints, sandboxed rendering
    # The sandbox of last resort where the kernel offers none; 11 MB.
    'pydantic-monty>=1.4,<2',
    'tensorboardX>=2.6.4',  # event files without TensorFlow
    'matplotlib>=3.9',  # curves.png
    'tqdm>=4.66',  # progress bar
]

HUB = [
    'safetensors>=0.5',  # the other file format of checkpoints
]

TEST = [
    *HUB,  # golden logits are checked on folders of safetensors
    'pytest>=8',
    'hypothesis>=6.100',  # property tests of tokenizers and parsers
    # Lints in .ci/run; the rules of a later minor release may differ.
    'ruff>=0.14,<0.18',
]

NOTEBOOKS = [
    'nbclient>=0.10',  # executes the notebooks in the tests
    'nbformat>=5.10',
    'ipykernel>=6.29',
]

PARITY = [
    # The reference implementations.  A machine without a GPU wants the CPU
    # build of torch: install that first.
    'torch>=2.6',
    'transformers>=4.57',
    *HUB,
]

DEV = [
    *TEST,
    *NOTEBOOKS,
    'pyink>=25.12',  # formats; two-space indent
    'jupytext>=1.16',  # writes a notebook from a script
]

setuptools.setup(
    name='agent_rl_jax',
    version='0.1.0',
    description=(
        'Reinforcement learning of tool-using language-model agents in JAX'
    ),
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=setuptools.find_packages(
        include=['agent_rl_jax', 'agent_rl_jax.*', 'configs', 'experiments']
    ),
    install_requires=CORE,
    extras_require={
        'hub': HUB,
        'test': TEST,
        'notebooks': NOTEBOOKS,
        'parity': PARITY,
        'dev': DEV,
    },
)
