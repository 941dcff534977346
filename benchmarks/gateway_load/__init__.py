"""The parts of `benchmarks/gateway.py`: a scripted engine, the gateways under test, loads and checks."""
