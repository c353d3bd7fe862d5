class RequestOutputKind:
    FINAL_ONLY = "final only"
