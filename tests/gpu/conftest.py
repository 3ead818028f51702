"""Tests of the engine over NCCL. They need GPUs and are run by name: ``pytest tests/gpu`` (or ``make test-gpu``)."""
