"""What tagged, classified and translated text is judged by. Plain functions of plain values."""
