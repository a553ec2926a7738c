"""Links: messages and all-reduces between ranks, and copies between a device and its host, measured."""
