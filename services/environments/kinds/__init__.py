"""Environments that were made for other libraries, each run by a program that asks the model."""
