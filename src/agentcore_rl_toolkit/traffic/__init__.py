"""Production traffic as rows of a data set: spans of traces in, redacted rows out."""
