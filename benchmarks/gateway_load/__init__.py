"""The parts of `benchmarks/gateway.py`: a scripted inference server, the gateways under test, loads and checks."""
