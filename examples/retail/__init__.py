"""The parts of the retail demo, see ``examples/retail_demo.py``."""
