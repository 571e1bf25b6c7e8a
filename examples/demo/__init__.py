"""The parts of train_demo.py: text, model, processes, the work of a rank, the proof and the report."""
