"""How a package that cimports epcy builds its modules."""

from Cython.Build import cythonize
from setuptools import Extension, setup

import epcy

router = Extension("router", ["router.pyx", "rows.c"], include_dirs=[epcy.get_include()])
setup(name="thirdparty", py_modules=[], ext_modules=cythonize([router], language_level=3))
