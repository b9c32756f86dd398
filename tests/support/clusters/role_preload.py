"""Imported once by the fork server of role processes: everything that their roles import, and a model's modules."""

import transformers.models.llama.modeling_llama

import tests.support.clusters.role_main

__all__ = ["tests", "transformers"]
