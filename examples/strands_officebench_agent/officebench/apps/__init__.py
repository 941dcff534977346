"""The office applications: plain classes over a workspace, a method for each thing that the model can do.

The model reads the docstrings. A method that cannot do its work raises `OfficeError` with the reason.
"""
