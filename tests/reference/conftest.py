"""One thread per process for this folder: its matrices are small, and on a busy machine more threads cost time."""

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
