"""What a trained model's attention looks like: data out, plots elsewhere."""

from kernel_attention.analysis.spectra import LayerSpectrum, attention_spectra

__all__ = ["LayerSpectrum", "attention_spectra"]
