"""What a folder of pictures means: names, classes and splits; and how a picture is decoded."""
