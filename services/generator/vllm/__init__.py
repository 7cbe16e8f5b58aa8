"""The engine on vLLM. Only this folder imports vLLM."""
