"""What `benchmarks/gateway.py` is made of: a scripted inference server, the gateways under test, loads and checks."""
