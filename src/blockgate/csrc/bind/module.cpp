// An empty Python module: importing it loads the library, which registers the ops with torch.
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>

extern "C" PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr,
                                   nullptr,               nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
