"""Trained models converted to other attention, in place, and a forecast of what it costs."""

from kernel_attention.analysis.conversion.convert import ConversionProgress, convert_attention
from kernel_attention.analysis.conversion.forecast import (
    ConversionForecast,
    LayerForecast,
    forecast_conversion,
)
from kernel_attention.analysis.conversion.report import (
    ConversionReport,
    ConvertedLayer,
    LayerPrice,
    LayerPrices,
)

__all__ = [
    "ConversionForecast",
    "ConversionProgress",
    "ConversionReport",
    "ConvertedLayer",
    "LayerForecast",
    "LayerPrice",
    "LayerPrices",
    "convert_attention",
    "forecast_conversion",
]
