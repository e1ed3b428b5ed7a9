"""Texts: plain ones in packed contexts, labelled ones, and vocabularies."""
