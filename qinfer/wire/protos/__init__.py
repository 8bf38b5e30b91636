"""The protobuf messages of gRPC's services; see scripts/generate_protos.py."""
