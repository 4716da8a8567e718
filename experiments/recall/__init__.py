"""Parts of `mqar.py`: mixers, published presets, plan of runs, training, tables and figures."""
