"""Parts of `mqar.py`: the mixers, the published presets, the plan of runs, their training, tables and figures."""
