class Platform:
    device_type: str

current_platform: Platform
