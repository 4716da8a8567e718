"""The experiment `serve.py`: its configuration, its measurements, its table and figures."""
