"""Parts of `lm.py`: text, references, model, training, checkpoints, table and figure."""
