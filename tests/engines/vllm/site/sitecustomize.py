"""Stands in for torchvision, in vLLM's processes of its own too: its builds for PyPI need CUDA.

Text models of the Qwen3.5 family import it and use nothing of it.
"""

from standins import stand_in

stand_in({"torchvision"})
