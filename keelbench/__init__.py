"""keelbench: measure the Maximum Tolerable Learning Rate of Transformer architectures."""

__version__ = "0.1.0"
