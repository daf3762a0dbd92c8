"""Who executes a step: NumPy, OpenVINO, PyTorch, CUDA."""
