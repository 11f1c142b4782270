"""Example texts, and where a small real model is installed."""

from ._packaged_model import minilm_path
from ._sentence_polarity import load_sentence_polarity

__all__ = ["load_sentence_polarity", "minilm_path"]
