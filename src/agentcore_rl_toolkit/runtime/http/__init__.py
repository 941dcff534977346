"""What callers speak to: HTTP, from the request to the runtime and back."""
