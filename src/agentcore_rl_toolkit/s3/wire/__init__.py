"""S3's wire format: requests, signatures, checksums, chunked bodies, documents and errors; no I/O of its own."""
