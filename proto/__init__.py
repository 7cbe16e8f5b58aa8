"""The wire contract: messages, their encoding and the sockets that carry them."""
