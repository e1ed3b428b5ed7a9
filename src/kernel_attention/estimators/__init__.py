"""Classifier and regressor of sequences with the interface of scikit-learn. Needs the extra ``estimators``.

Legend of shapes: n cases, c channels, n_i time steps of case i, k classes.
"""

from kernel_attention.estimators.classifier import AttentionClassifier
from kernel_attention.estimators.regressor import AttentionRegressor

__all__ = ["AttentionClassifier", "AttentionRegressor"]
