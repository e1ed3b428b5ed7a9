"""An estimator that is trained on a GPU."""

import pytest
import torch

pytest.importorskip("pydantic")  # a machine with a GPU and without the extra `train`
is_classifier = pytest.importorskip("sklearn.base").is_classifier


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_trained_on_a_gpu_rests_on_the_cpu(estimator, arrays):
    X, y = arrays[0], arrays[1 if is_classifier(estimator) else 2]
    torch.cuda.manual_seed_all(5)
    before = torch.cuda.get_rng_state()
    estimator.set_params(accelerator="gpu").fit(X, y)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    on_gpu = estimator._outputs(X)
    assert {parameter.device.type for parameter in estimator.model_.parameters()} == {"cpu"}
    torch.testing.assert_close(
        estimator.set_params(accelerator="cpu")._outputs(X), on_gpu, atol=1e-3, rtol=1e-3
    )
