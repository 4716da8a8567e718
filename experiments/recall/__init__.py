"""Parts of `mqar.py` and `recall.py`: mixers, plans of runs, training, tables and figures."""
