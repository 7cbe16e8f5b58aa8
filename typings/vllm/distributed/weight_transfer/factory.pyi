class WeightTransferEngineFactory:
    _registry: dict[str, object]
    @classmethod
    def register_engine(cls, name: str, module_path: str, class_name: str) -> None: ...
