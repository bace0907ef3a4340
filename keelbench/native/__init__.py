"""A training step on the CPU in two calls into C: forward and backward of the whole model.

``trace`` writes a rule's arithmetic down as operations, ``plan`` lays out their memory,
``program`` runs them, ``kernels`` gives single sub-layers to rules that cannot be traced.
``library`` compiles the C source once per machine; without a compiler the model runs on
plain torch operations. Both compute the same values up to rounding.
"""
