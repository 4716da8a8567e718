"""Parts of `lm.py`: text, reference compressors, model, training, checkpoints, tables and figures."""
