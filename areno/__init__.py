"""AReno with Ray-distributed materialization: GRPO and GSPO post-training of language models on one node."""

__version__ = "0.1.0"
