"""The runtime's HTTP server: from the request to the runtime and back."""
