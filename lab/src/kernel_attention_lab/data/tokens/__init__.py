"""Labelled token sequences: texts, and the tasks of Long Range Arena."""
