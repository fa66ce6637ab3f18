"""Operations shared by the sparse attention variants."""
